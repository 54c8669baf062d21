"""The write path: one replica is a supervised engine process and a collector of its KV events."""

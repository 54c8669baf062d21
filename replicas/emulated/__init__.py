"""An emulated vLLM engine: genuine block pool, prefix cache and scheduler; modelled GPU time.

`block_hashes`, `block_pool`, `scheduler` and `step_time` are pure; `engine` drives them by an event loop; `server` puts
vLLM's HTTP API and KV-event sockets around one engine. Start it with `python -m replicas.emulated --help`.
"""

"""The Ray Serve application: ingress, request-router adapter, autoscaling, metrics and command line."""

"""Where each data-parallel rank publishes its events: our rule against vLLM's."""

from __future__ import annotations

import pytest

from replicas.engine import rank_endpoint


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://*:5557", "tcp://[::1]:5557", "inproc://cache"])
@pytest.mark.parametrize("rank", [0, 1, 7])
def test_e11_ranks_are_where_vllm_puts_them(vllm_is_there: None, endpoint: str, rank: int) -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    assert rank_endpoint(endpoint, rank) == ZmqEventPublisher.offset_endpoint_port(endpoint, rank)

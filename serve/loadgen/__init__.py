"""Load for a live OpenAI endpoint, and what came of it. Knows HTTP and nothing of Ray.

    files, prompts  -->  Call, Session       what to send, and when
    drive           -->  Target.call()       closed loop, open loop, sessions
    client          -->  Outcome             one streamed answer, measured
    stats, show     -->  figures, text

`measure` runs a load within its bounds; `reference` and `fit` are built on it. Times are the engine's seconds: wall
seconds times the clock's factor, which is 1 for an engine that runs in real time.
"""

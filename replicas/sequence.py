"""Order in an engine's event stream: what to do with each sequence number. No sockets here.

    FOLLOWING --live seq is the next one--> deliver
        |  ^
        |  '--replay ended, held messages fit---.
        '--gap: hold, ask for a replay--> REPLAYING --nothing closes the gap--> Lost, REPLAYING from 0

A PUB socket never repeats or reorders, so a live number that goes back means that the engine started anew. The numbers
alone don't always show it (a new engine may have caught up with the old one's numbers while nobody listened): a
*probe* asks again for the last message taken and compares it.
Every state with every input: tests/unit/replicas/test_sequence_table.py.
What came first may be any suffix of the stream: blocks stored before it are merely unknown. A hole is another matter,
as removals may be in it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

Message = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Deliver:
    """The next message, to be taken exactly once."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for everything it still has from `start` on. `fresh`: over a new socket, so that what an
    earlier question may still get is not taken for this one's answer."""

    start: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine began a new stream: nothing that it told before holds."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages are gone for good: what is known of the engine's blocks may be wrong."""

    reason: str


Step = Deliver | AskReplay | Restarted | Lost


@dataclass(slots=True)
class _Replay:
    verify: bool = False
    verified: bool = False
    messages: int = 0


@dataclass(slots=True)
class SequenceTracker:
    """Every method returns the steps to take, in order.

    `max_held`: live messages kept while a replay runs. `max_attempts`: questions without any progress before a hole
    counts as lost. Counters: gaps, replays, replay_timeouts, duplicates, restarts, lost.
    """

    can_replay: bool = True
    max_held: int = 20_000
    max_attempts: int = 3
    counters: Counter[str] = field(default_factory=Counter)
    _next: int | None = None  # None: whatever comes first
    _last_live: Message | None = None
    _last_taken: bytes = b""
    _replay: _Replay | None = None
    _replay_ever_answered: bool = False
    _probe_wanted: bool = False
    _attempts: int = 0
    _held: deque[Message] = field(default_factory=deque)
    # What replays brought ahead of the live stream: the same messages may still arrive there.
    _ahead: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def seq(self) -> int:
        """Last message taken, -1 where there is none."""
        return -1 if self._next is None else self._next - 1

    @property
    def replaying(self) -> bool:
        return self._replay is not None

    @property
    def in_doubt(self) -> bool:
        """Is a hole open in what was taken? Removals may be in it."""
        return self._next is not None and self._replay is not None and not self._replay.verify

    def start(self) -> list[Step]:
        return [self._ask()] if self.can_replay else []

    def live(self, seq: int, payload: bytes) -> list[Step]:
        last = self._last_live
        if last is not None and seq <= last[0]:
            if (seq, payload) != last:
                return self._restart((seq, payload))
            self.counters["duplicates"] += 1
            return []
        if not self._may_be_late(seq, payload):
            return self._restart((seq, payload))
        self._last_live = (seq, payload)
        self._held.append((seq, payload))
        if self._replay is None:
            return list(self._drain())
        if len(self._held) > self.max_held:
            return self._give_up(f"more than {self.max_held} messages came while waiting for a replay")
        return []

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        replay = self._replay
        if replay is None:
            return []
        self._replay_ever_answered = True
        replay.messages += 1
        if replay.verify and not replay.verified and seq == self.seq:
            if payload != self._last_taken:
                return self._restart(None)
            replay.verified = True
        if self._next is None:
            self._next = seq
        if seq < self._next:
            return []
        steps: list[Step] = []
        if seq > self._next:
            if replay.messages > 1 and self._attempts < self.max_attempts:
                return self._again(f"a replay went from {self._next - 1} to {seq}")
            # Older ones are gone from the publisher's buffer, and asking from 0 would lead to the same hole again.
            steps.append(self._lose(f"the publisher has {seq}, but not {self._next}"))
            replay.verify = False
        self._attempts = 0
        if self._last_live is None or seq > self._last_live[0]:
            self._ahead.append((seq, hash(payload)))
        return [*steps, self._take(seq, payload)]

    def replay_ended(self) -> list[Step]:
        replay, self._replay = self._replay, None
        if replay is None:
            return []
        self._replay_ever_answered = True
        if replay.verify and not replay.verified:
            return self._restart(None)  # this publisher never sent what was taken last
        if self._next is None:
            self._next = self._held[0][0] if self._held else 0
        steps = list(self._drain())
        if self._probe_wanted and self._replay is None:
            steps += self.probe()
        return steps

    def replay_timed_out(self) -> list[Step]:
        if self._replay is None:
            return []
        self.counters["replay_timeouts"] += 1
        return self._again("no answer from the replay socket")

    def probe(self) -> list[Step]:
        """Is this still the stream that was followed, and is its end known? For quiet times and after a reconnect."""
        if not self.can_replay:
            return []
        if self._replay is not None:
            self._probe_wanted = True
            return []
        self._probe_wanted = False
        return [self._ask(verify=self.seq >= 0)]

    def reconnected(self) -> list[Step]:
        """The connection to the publisher was lost and is back: whatever was sent meanwhile is missing."""
        if self.can_replay or self.seq < 0:
            return self.probe()
        self._forget_stream(None)
        self.counters["lost"] += 1
        return [Lost("the connection broke, and there is no replay socket")]

    # ----------------------------------------------------------------------------------------------------------------

    def _take(self, seq: int, payload: bytes) -> Deliver:
        self._next = seq + 1
        self._last_taken = payload
        return Deliver(seq, payload)

    def _may_be_late(self, seq: int, payload: bytes) -> bool:
        """A live message older than what was taken is fine where a replay brought that very message before."""
        while self._ahead and self._ahead[0][0] < seq:
            self._ahead.popleft()
        if self._next is None or seq >= self._next or self._replay is not None:
            return True
        return bool(self._ahead) and self._ahead[0] == (seq, hash(payload))

    def _drain(self) -> Iterator[Step]:
        while self._held:
            seq, payload = self._held[0]
            if self._next is not None and seq > self._next:
                self.counters["gaps"] += not self._attempts
                if self.can_replay:
                    yield from self._again(f"{self._next} to {seq - 1} are missing")
                    return
                self.counters["lost"] += 1
                yield Lost(f"{self._next} to {seq - 1} are missing, and there is no replay socket")
                self._next = None
            self._held.popleft()
            if self._next is None or seq == self._next:
                self._attempts = 0
                yield self._take(seq, payload)

    def _ask(self, *, verify: bool = False, fresh: bool = False) -> AskReplay:
        self._replay = _Replay(verify)
        self.counters["replays"] += 1
        return AskReplay(max(0, self.seq if verify else self.seq + 1), fresh)

    def _again(self, reason: str) -> list[Step]:
        verify = self._replay is not None and self._replay.verify
        fresh = self._replay is not None
        if self._attempts >= self.max_attempts:
            return self._give_up(reason)
        self._attempts += 1
        return [self._ask(verify=verify, fresh=fresh)]

    def _give_up(self, reason: str) -> list[Step]:
        self._attempts = 0
        answered, self._replay = self._replay is None, None
        if not self._replay_ever_answered and (self._held or self._next is not None):
            self.can_replay = False
            self.counters["replay_given_up"] += 1
        if self._next is None:
            if self._held:
                return list(self._drain())
            return [self._ask(fresh=True)]
        lost = self._lose(reason)
        # The publisher has no more than it sent: the next replay would end here too.
        if answered or not self.can_replay:
            return [lost, *self._drain()]
        return [lost, self._ask(fresh=True)]

    def _lose(self, reason: str) -> Lost:
        self._next = None
        self._attempts = 0
        self._ahead.clear()
        self.counters["lost"] += 1
        return Lost(reason)

    def _restart(self, first: Message | None) -> list[Step]:
        self._forget_stream(first)
        self.counters["restarts"] += 1
        return [Restarted(), *([self._ask(fresh=True)] if self.can_replay else self._drain())]

    def _forget_stream(self, first: Message | None) -> None:
        if first is not None:
            self._held.clear()
            self._held.append(first)
        self._last_live = self._held[-1] if self._held else None
        self._next = None
        self._ahead.clear()
        self._attempts = 0
        self._replay = None

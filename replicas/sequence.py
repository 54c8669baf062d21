"""Order in an engine's event stream: what to do with each sequence number. No sockets here.

A PUB socket never repeats or reorders, so a live number that goes back means that the engine started anew. The numbers
alone don't always show it (a new engine may have caught up with the old one's numbers while nobody listened): a
*probe* asks again for the last message taken and compares it.
What came first may be any suffix of the stream: blocks stored before it are merely unknown. A hole is another matter,
as removals may be in it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

Message = tuple[int, bytes]


class State(Enum):
    LISTENING = "live messages are taken as they come; nobody can be asked for a missing one"
    FOLLOWING = "the same, and what is missing can be asked for"
    STARTING = "nothing is taken yet, the past is being replayed; live messages are held, as below"
    REPLAYING = "what is missing is being replayed"
    VERIFYING = "a probe: is the last message taken still the publisher's?"
    VERIFIED = "it is; what came after it is being replayed"


class Input(Enum):
    LIVE_NEWER = "than any live message before"
    LIVE_REPEATED = "the last live message, to the byte"
    LIVE_BACK = "an older number, or other bytes under the last one"
    REPLAYED_OLD = "before the last message taken"
    REPLAYED_LAST = "the number of the last message taken"
    REPLAYED_NEXT = "the number after it"
    REPLAYED_LATER = "a number after that"
    REPLAY_ENDED = "the publisher has no more"
    REPLAY_SILENT = "no answer for too long"
    PROBE = "it has been quiet for a while"
    RECONNECTED = "the connection to the publisher was lost and is back: what was sent meanwhile is missing"


_ACTIONS: Mapping[Input, tuple[str, ...]] = {
    #                          LISTENING   FOLLOWING   STARTING       REPLAYING      VERIFYING      VERIFIED
    Input.LIVE_NEWER:         ("follow",   "follow",   "hold",        "hold",        "hold",        "hold"),
    Input.LIVE_REPEATED:      ("skip",     "skip",     "skip",        "skip",        "skip",        "skip"),
    Input.LIVE_BACK:          ("restart",  "restart",  "restart",     "restart",     "restart",     "restart"),
    Input.REPLAYED_OLD:       ("ignore",   "ignore",   "begin",       "ignore",      "ignore",      "ignore"),
    Input.REPLAYED_LAST:      ("ignore",   "ignore",   "begin",       "ignore",      "compare",     "ignore"),
    Input.REPLAYED_NEXT:      ("ignore",   "ignore",   "begin",       "take",        "take",        "take"),
    Input.REPLAYED_LATER:     ("ignore",   "ignore",   "begin",       "jump",        "jump",        "jump"),
    Input.REPLAY_ENDED:       ("ignore",   "ignore",   "join_live",   "join_live",   "restart",     "join_live"),
    Input.REPLAY_SILENT:      ("ignore",   "ignore",   "ask_again",   "ask_again",   "ask_again",   "ask_again"),
    Input.PROBE:              ("ignore",   "probe",    "probe_later", "probe_later", "probe_later", "probe_later"),
    Input.RECONNECTED:        ("lose_all", "probe",    "probe_later", "probe_later", "probe_later", "probe_later"),
}  # fmt: skip
TABLE: Mapping[tuple[State, Input], str] = {
    (state, what): action for what, actions in _ACTIONS.items() for state, action in zip(State, actions, strict=True)
}
"""What each input does in each state: a method of `SequenceTracker`, which also sets the next state."""


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
class SequenceTracker:
    """Every method returns the steps to take, in order.

    `max_held`: live messages kept while a replay runs. `max_attempts`: questions without any progress before a hole
    counts as lost. Counters: gaps, replays, replay_timeouts, duplicates, restarts, lost.
    """

    can_replay: bool = True
    max_held: int = 20_000
    max_attempts: int = 3
    counters: Counter[str] = field(default_factory=Counter)
    state: State = field(init=False)
    _next: int | None = None  # None: whatever comes first
    _last_live: Message | None = None
    _last_taken: bytes = b""
    _replay_messages: int = 0  # of the replay that runs
    _replay_ever_answered: bool = False
    _probe_wanted: bool = False
    _attempts: int = 0
    _held: deque[Message] = field(default_factory=deque)
    # What replays brought ahead of the live stream: the same messages may still arrive there.
    _ahead: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._follow_on()

    @property
    def seq(self) -> int:
        """Last message taken, -1 where there is none."""
        return -1 if self._next is None else self._next - 1

    @property
    def replaying(self) -> bool:
        return self.state not in (State.LISTENING, State.FOLLOWING)

    @property
    def in_doubt(self) -> bool:
        """Is a hole open in what was taken? Removals may be in it."""
        return self.state is State.REPLAYING

    def start(self) -> list[Step]:
        return [self._ask()] if self.can_replay else []

    def live(self, seq: int, payload: bytes) -> list[Step]:
        last = self._last_live
        if last is None or seq > last[0]:
            return self._on(Input.LIVE_NEWER, seq, payload)
        return self._on(Input.LIVE_REPEATED if (seq, payload) == last else Input.LIVE_BACK, seq, payload)

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        if self.replaying:
            self._replay_ever_answered = True
            self._replay_messages += 1
        if seq <= self.seq:
            return self._on(Input.REPLAYED_LAST if seq == self.seq else Input.REPLAYED_OLD, seq, payload)
        return self._on(Input.REPLAYED_NEXT if seq == self.seq + 1 else Input.REPLAYED_LATER, seq, payload)

    def replay_ended(self) -> list[Step]:
        self._replay_ever_answered |= self.replaying
        return self._on(Input.REPLAY_ENDED)

    def replay_timed_out(self) -> list[Step]:
        self.counters["replay_timeouts"] += self.replaying
        return self._on(Input.REPLAY_SILENT)

    def probe(self) -> list[Step]:
        """Is this still the stream that was followed, and is its end known? For quiet times and after a reconnect."""
        return self._on(Input.PROBE)

    def reconnected(self) -> list[Step]:
        """The connection to the publisher was lost and is back: whatever was sent meanwhile is missing."""
        return self._on(Input.RECONNECTED)

    def _on(self, what: Input, seq: int = -1, payload: bytes = b"") -> list[Step]:
        action: Callable[[int, bytes], list[Step]] = getattr(self, f"_{TABLE[self.state, what]}")
        return action(seq, payload)

    # --- actions ----------------------------------------------------------------------------------------------------

    def _ignore(self, seq: int, payload: bytes) -> list[Step]:
        return []

    def _skip(self, seq: int, payload: bytes) -> list[Step]:
        self.counters["duplicates"] += 1
        return []

    def _follow(self, seq: int, payload: bytes) -> list[Step]:
        while self._ahead and self._ahead[0][0] < seq:
            self._ahead.popleft()
        known = bool(self._ahead) and self._ahead[0] == (seq, hash(payload))
        if seq <= self.seq and not known:  # only what a replay brought before may come that late
            return self._restart(seq, payload)
        self._last_live = (seq, payload)
        self._held.append(self._last_live)
        return list(self._drain())

    def _hold(self, seq: int, payload: bytes) -> list[Step]:
        self._last_live = (seq, payload)
        self._held.append(self._last_live)
        if len(self._held) > self.max_held:
            return self._give_up(f"more than {self.max_held} messages came while waiting for a replay")
        return []

    def _restart(self, seq: int, payload: bytes) -> list[Step]:
        """The publisher is a new one. A live message is the first that is known of it; -1: a replay showed it."""
        if seq >= 0:
            self._held.clear()
            self._held.append((seq, payload))
        self._forget_stream()
        self.counters["restarts"] += 1
        return [Restarted(), *([self._ask(fresh=True)] if self.can_replay else self._drain())]

    def _compare(self, seq: int, payload: bytes) -> list[Step]:
        if payload != self._last_taken:
            return self._restart(-1, b"")
        self.state = State.VERIFIED
        return []

    def _begin(self, seq: int, payload: bytes) -> list[Step]:
        self.state = State.REPLAYING
        return self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> list[Step]:
        self._attempts = 0
        if self._last_live is None or seq > self._last_live[0]:
            self._ahead.append((seq, hash(payload)))
        return [self._deliver(seq, payload)]

    def _jump(self, seq: int, payload: bytes) -> list[Step]:
        if self._replay_messages > 1 and self._attempts < self.max_attempts:
            return self._again(f"a replay went from {self.seq} to {seq}")
        # Older ones are gone from the publisher's buffer, and asking from 0 would lead to the same hole again.
        lost = self._lose(f"the publisher has {seq}, but not {self._next}")
        return [lost, *self._begin(seq, payload)]

    def _join_live(self, seq: int, payload: bytes) -> list[Step]:
        self._follow_on()
        if self._next is None:
            self._next = self._held[0][0] if self._held else 0
        steps = list(self._drain())
        return steps + self.probe() if self._probe_wanted and not self.replaying else steps

    def _ask_again(self, seq: int, payload: bytes) -> list[Step]:
        return self._again("no answer from the replay socket")

    def _probe(self, seq: int, payload: bytes) -> list[Step]:
        self._probe_wanted = False
        return [self._ask(verify=self.seq >= 0)]

    def _probe_later(self, seq: int, payload: bytes) -> list[Step]:
        self._probe_wanted = True
        return []

    def _lose_all(self, seq: int, payload: bytes) -> list[Step]:
        if self.seq < 0:
            return []
        self._forget_stream()
        return [self._lose("the connection broke, and there is no replay socket")]

    # --- what they share --------------------------------------------------------------------------------------------

    def _follow_on(self) -> None:
        self.state = State.FOLLOWING if self.can_replay else State.LISTENING

    def _deliver(self, seq: int, payload: bytes) -> Deliver:
        self._next = seq + 1
        self._last_taken = payload
        return Deliver(seq, payload)

    def _drain(self) -> Iterator[Step]:
        """Take what is held, up to a gap, which is asked for or, where that can't be, lost."""
        while self._held:
            seq, payload = self._held[0]
            if self._next is not None and seq > self._next:
                self.counters["gaps"] += not self._attempts
                if self.can_replay:
                    yield from self._again(f"{self._next} to {seq - 1} are missing")
                    return
                yield self._lose(f"{self._next} to {seq - 1} are missing, and there is no replay socket")
            self._held.popleft()
            if self._next is None or seq == self._next:
                self._attempts = 0
                yield self._deliver(seq, payload)

    def _ask(self, *, verify: bool = False, fresh: bool = False) -> AskReplay:
        self.state = State.VERIFYING if verify else State.STARTING if self._next is None else State.REPLAYING
        self._replay_messages = 0
        self.counters["replays"] += 1
        return AskReplay(max(0, self.seq if verify else self.seq + 1), fresh)

    def _again(self, reason: str) -> list[Step]:
        if self._attempts >= self.max_attempts:
            return self._give_up(reason)
        self._attempts += 1
        return [self._ask(verify=self.state in (State.VERIFYING, State.VERIFIED), fresh=self.replaying)]

    def _give_up(self, reason: str) -> list[Step]:
        self._attempts = 0
        answered = not self.replaying
        if not self._replay_ever_answered and (self._held or self._next is not None):
            self.can_replay = False
            self.counters["replay_given_up"] += 1
        self._follow_on()
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

    def _forget_stream(self) -> None:
        self._follow_on()
        self._last_live = self._held[-1] if self._held else None
        self._next = None
        self._ahead.clear()
        self._attempts = 0

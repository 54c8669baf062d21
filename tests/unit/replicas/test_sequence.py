from __future__ import annotations

import pytest

from replicas.sequence import AskReplay, Deliver, Lost, Restarted, SequenceTracker, Step


def message(seq: int, engine: str = "first") -> bytes:
    return f"{engine} {seq}".encode()


def taken(steps: list[Step]) -> list[int]:
    assert all(isinstance(step, Deliver) for step in steps), steps
    return [step.seq for step in steps if isinstance(step, Deliver)]


def following(last_seq: int, *, can_replay: bool = True) -> SequenceTracker:
    """A tracker that has taken 0..last_seq from the live stream."""
    tracker = SequenceTracker(can_replay=can_replay)
    tracker.start()
    tracker.replay_ended()
    for seq in range(last_seq + 1):
        assert taken(tracker.live(seq, message(seq))) == [seq]
    return tracker


def replay(tracker: SequenceTracker, *seqs: int, engine: str = "first") -> list[Step]:
    steps = [step for seq in seqs for step in tracker.replayed(seq, message(seq, engine))]
    return [*steps, *tracker.replay_ended()]


def test_it_starts_with_a_replay_from_the_very_beginning() -> None:
    tracker = SequenceTracker()
    assert tracker.start() == [AskReplay(0)]
    assert taken(replay(tracker, 0, 1, 2)) == [0, 1, 2]
    assert taken(tracker.live(3, message(3))) == [3]
    assert tracker.seq == 3


def test_a_late_joiner_takes_what_the_buffer_still_has() -> None:
    tracker = SequenceTracker()
    tracker.start()
    assert taken(replay(tracker, 700, 701)) == [700, 701]
    assert taken(tracker.live(702, message(702))) == [702]


def test_a_gap_is_asked_for_once_and_closed_in_order() -> None:
    tracker = following(2)
    assert tracker.live(5, message(5)) == [AskReplay(3)]
    assert taken(replay(tracker, 3, 4)) == [3, 4, 5]
    assert tracker.counters["gaps"] == 1


def test_live_messages_wait_for_the_replay_and_none_is_taken_twice() -> None:
    tracker = following(2)
    assert tracker.live(5, message(5)) == [AskReplay(3)]
    assert taken(tracker.replayed(3, message(3))) == [3]
    assert tracker.live(6, message(6)) == []
    assert taken(tracker.replayed(4, message(4))) == [4]
    assert taken(tracker.replayed(5, message(5))) == [5]
    assert taken(tracker.replay_ended()) == [6]
    assert taken(tracker.live(7, message(7))) == [7]


def test_a_live_message_that_a_replay_brought_first_is_taken_once() -> None:
    tracker = following(2)
    assert tracker.probe() == [AskReplay(2)]
    assert taken(replay(tracker, 2, 3, 4)) == [3, 4]
    assert tracker.live(3, message(3)) == []
    assert tracker.live(4, message(4)) == []
    assert taken(tracker.live(5, message(5))) == [5]
    assert tracker.counters["restarts"] == 0


def test_a_message_delivered_twice_is_taken_once() -> None:
    tracker = following(2)
    assert tracker.live(2, message(2)) == []
    assert tracker.counters["duplicates"] == 1


def test_an_engine_restarted_in_place_is_noticed_without_a_replay_socket() -> None:
    tracker = following(41, can_replay=False)
    first = message(0, "second")
    assert tracker.live(0, first) == [Restarted(), Deliver(0, first)]
    assert taken(tracker.live(1, message(1, "second"))) == [1]


def test_after_a_restart_the_new_stream_is_replayed_from_its_beginning() -> None:
    tracker = following(41)
    assert tracker.live(3, message(3, "second")) == [Restarted(), AskReplay(0, fresh=True)]
    assert taken(replay(tracker, 0, 1, 2, 3, engine="second")) == [0, 1, 2, 3]
    assert taken(tracker.live(4, message(4, "second"))) == [4]


def test_a_restarted_engine_s_same_number_is_no_duplicate() -> None:
    tracker = following(0)
    assert tracker.live(0, message(0, "second"))[0] == Restarted()


def test_a_restart_hidden_by_fitting_numbers_shows_at_the_reconnect() -> None:
    tracker = following(41)
    assert tracker.reconnected() == [AskReplay(41)]
    assert tracker.replayed(41, message(41, "second")) == [Restarted(), AskReplay(0, fresh=True)]


def test_a_publisher_that_never_sent_our_last_message_is_a_new_one() -> None:
    tracker = following(41)
    tracker.reconnected()
    assert tracker.replay_ended() == [Restarted(), AskReplay(0, fresh=True)]


def test_a_reconnect_to_the_same_stream_brings_what_was_missed() -> None:
    tracker = following(2)
    tracker.reconnected()
    assert taken(replay(tracker, 2, 3)) == [3]
    assert tracker.counters["restarts"] == 0


def test_a_reconnect_during_a_replay_is_checked_afterwards() -> None:
    tracker = following(2)
    tracker.live(5, message(5))
    assert tracker.reconnected() == []
    steps = replay(tracker, 3, 4)
    assert steps[-1] == AskReplay(5)
    assert taken(steps[:-1]) == [3, 4, 5]


def test_without_a_replay_socket_a_broken_connection_is_a_loss() -> None:
    tracker = following(2, can_replay=False)
    (step,) = tracker.reconnected()
    assert isinstance(step, Lost)
    assert taken(tracker.live(9, message(9))) == [9]


def test_without_a_replay_socket_a_gap_is_a_loss() -> None:
    tracker = following(2, can_replay=False)
    lost, taken_step = tracker.live(5, message(5))
    assert isinstance(lost, Lost)
    assert taken_step == Deliver(5, message(5))
    assert taken(tracker.live(6, message(6))) == [6]


def test_a_gap_older_than_the_buffer_is_a_loss_and_the_buffer_is_taken_anew() -> None:
    tracker = following(2)
    tracker.live(90, message(90))
    lost, first = tracker.replayed(50, message(50))
    assert isinstance(lost, Lost)
    assert first == Deliver(50, message(50))
    assert taken(replay(tracker, *range(51, 91))) == list(range(51, 91))
    assert taken(tracker.live(91, message(91))) == [91]


def test_a_hole_in_the_publisher_s_buffer_is_lost_once_and_not_met_again_and_again() -> None:
    tracker = SequenceTracker()
    tracker.start()
    assert taken([step for seq in (0, 1) for step in tracker.replayed(seq, message(seq))]) == [0, 1]
    steps = tracker.replayed(4, message(4))
    assert steps == [AskReplay(2, fresh=True)]
    lost, first = tracker.replayed(4, message(4))
    assert isinstance(lost, Lost)
    assert first == Deliver(4, message(4))
    assert taken(replay(tracker, 5)) == [5]
    assert tracker.counters["lost"] == 1


def test_a_hole_between_the_buffer_s_end_and_the_live_stream_is_lost_once() -> None:
    tracker = following(2)
    steps = tracker.live(9, message(9))
    while steps == [AskReplay(3)]:
        steps = replay(tracker)
    assert isinstance(steps[0], Lost)
    assert steps[1:] == [Deliver(9, message(9))]
    assert taken(tracker.live(10, message(10))) == [10]
    assert tracker.counters["lost"] == 1


def test_a_gap_that_a_replay_leaves_open_is_lost_after_a_few_questions() -> None:
    tracker = following(2)
    steps = tracker.live(5, message(5))
    for _ in range(tracker.max_attempts - 1):
        assert steps == [AskReplay(3)]
        steps = tracker.replay_ended()
    steps = tracker.replay_ended()
    assert isinstance(steps[0], Lost)
    assert tracker.counters["gaps"] == 1


def test_a_silent_replay_socket_is_asked_again_over_a_new_one() -> None:
    tracker = following(2)
    tracker.live(5, message(5))
    assert tracker.replay_timed_out() == [AskReplay(3, fresh=True)]
    assert taken(replay(tracker, 3, 4)) == [3, 4, 5]


def test_a_replay_socket_that_falls_silent_for_good_is_a_loss_not_a_hang() -> None:
    tracker = following(2)
    tracker.live(5, message(5))
    steps = [tracker.replay_timed_out() for _ in range(tracker.max_attempts)][-1]
    assert isinstance(steps[0], Lost)
    assert steps[1] == AskReplay(0, fresh=True)
    steps = [tracker.replay_timed_out() for _ in range(tracker.max_attempts + 1)][-1]
    assert taken(steps) == [5]


def test_a_replay_socket_that_never_answered_is_given_up() -> None:
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.live(4, message(4)) == []
    steps = [tracker.replay_timed_out() for _ in range(tracker.max_attempts + 1)][-1]
    assert taken(steps) == [4]
    assert not tracker.can_replay
    assert tracker.probe() == []


def test_an_engine_that_is_not_up_yet_is_waited_for() -> None:
    tracker = SequenceTracker()
    tracker.start()
    for _ in range(20):
        assert tracker.replay_timed_out() == [AskReplay(0, fresh=True)]
    assert taken(replay(tracker, 0)) == [0]


def test_held_messages_are_bounded() -> None:
    tracker = following(2)
    tracker.max_held = 10
    tracker.live(5, message(5))
    for seq in range(6, 15):
        assert tracker.live(seq, message(seq)) == []
    steps = tracker.live(15, message(15))
    assert isinstance(steps[0], Lost)


def test_answers_to_nothing_asked_are_ignored() -> None:
    tracker = following(2)
    assert tracker.replayed(1, message(1)) == []
    assert tracker.replay_ended() == []


@pytest.mark.parametrize("lost", [range(0), range(3, 4), range(1, 7), range(9, 10)])
def test_whatever_the_live_stream_lost_the_whole_arrives_in_order(lost: range) -> None:
    tracker = SequenceTracker()
    tracker.start()
    got = taken(tracker.replay_ended())
    for seq in range(12):
        if seq in lost:
            continue
        steps = tracker.live(seq, message(seq))
        if AskReplay(lost.start) in steps:
            steps = replay(tracker, *range(lost.start, seq + 1))
        got += taken(steps)
    assert got == list(range(12))

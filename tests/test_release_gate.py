"""The release gate (DESIGN 3): no group is trained by weights further ahead than the bound, none is dropped, none ends twice."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import ReleaseGate


def walk_gate(batch: int, staleness: int, steps: int, random) -> Counter:
    """A whole run with arrivals in random order and late training; every promise of DESIGN 3 is checked after each event."""
    gate, step_of, back, fate, seen = ReleaseGate(batch, staleness, steps), {}, Counter(), Counter(), Counter()
    out: list[int] = []  # released, not back
    while gate.version < steps:
        due = gate.due()
        assert due == sorted(due)
        for step in due:
            group = len(step_of)
            gate.release(group, step)
            step_of[group] = step
            out.append(group)
            assert gate.version <= step <= min(gate.version + staleness, steps - 1), "released too early, too late or for no step"
        assert gate.due() == [], "the same place is offered twice"
        assert gate.outstanding == len(step_of) - sum(fate.values()) <= (staleness + 1) * batch
        open_steps = range(gate.version, min(gate.version + staleness, steps - 1) + 1)
        held = Counter(step_of[g] for g in out) + back
        assert all(held[step] == batch for step in open_steps), "a step that may start is not filled, or is over-filled"
        here = sorted(g for g, step in step_of.items() if step == gate.version and g not in out and not fate[g])
        assert gate.groups() == here
        assert gate.ready() == (back[gate.version] == batch), "a step waits for all its groups, and for no more"
        if gate.ready() and (not out or random.random() < 0.5):
            seen["waited"] += sum(back.values()) > batch
            assert gate.train() == here and len(here) == batch
            fate.update(here)
            back.pop(gate.version - 1)
            continue
        group = out.pop(random.randrange(len(out)))
        outcome = random.choice(["trained", "trained", "unscored", "filtered"])
        assert gate.arrive(group, outcome) == step_of[group]
        seen[outcome] += 1
        with pytest.raises(KeyError):
            gate.arrive(group, outcome)  # a group ends once
        if outcome == "filtered":
            fate[group] += 1
            assert gate.due() == [step_of[group]], "one replacement, into the same step"
        else:
            back[step_of[group]] += 1
            assert gate.due() == []
    assert gate.outstanding == 0 and gate.due() == [] and out == []
    assert set(fate.values()) <= {1} and len(fate) == len(step_of), "each group ends exactly once"
    assert gate.ended == +Counter({outcome: seen[outcome] for outcome in ("trained", "unscored", "filtered")})
    assert gate.ended.total() - gate.ended["filtered"] == batch * steps
    return seen


def explore(examples: int, fixed: bool) -> Counter:
    seen = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=fixed, database=None)
    @given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 6), st.randoms(use_true_random=False))
    def run(batch, staleness, steps, random):
        seen.update(walk_gate(batch, staleness, steps, random))

    run()
    return seen


def test_release_gate_in_random_arrival_order():
    """DESIGN 3: bound never exceeded, each group ends once, outstanding <= (k+1) batch, steps wait, filtered are replaced."""
    seen = explore(200, fixed=True)
    assert min(seen[event] for event in ("trained", "unscored", "filtered", "waited")) >= 50


@pytest.mark.long
def test_release_gate_in_many_new_orders():
    """The same with other sequences every time."""
    explore(5000, fixed=False)


@pytest.mark.parametrize("staleness, due", [(0, [0, 0]), (1, [0, 0, 1, 1]), (3, [0, 0, 1, 1, 2, 2])])
def test_release_gate_at_the_start_of_a_run_of_three_steps(staleness, due):
    """0 is strictly on-policy, 1 one-step-off; nothing is released for steps that the run does not have."""
    assert ReleaseGate(2, staleness, 3).due() == due


def test_release_gate_refuses_what_breaks_its_bound():
    """Releasing ahead, twice, or into a full step, and training early, are caught where they happen."""
    gate = ReleaseGate(1, 1, 9)
    with pytest.raises(AssertionError, match="group 0 of step 2 released at version 0"):
        gate.release(0, 2)
    gate.release(0, 0)
    with pytest.raises(AssertionError, match="released twice"):
        gate.release(0, 1)
    with pytest.raises(AssertionError, match="step 0 trained before all its groups were back"):
        gate.train()
    gate.arrive(0, "trained")
    with pytest.raises(AssertionError):
        gate.release(0, 1)  # it is back, not gone
    with pytest.raises(AssertionError):
        gate.release(1, 0)  # the step is full

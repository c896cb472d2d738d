"""Which learner rank trains which samples, and in which micro-batch. No torch.

A sample of length n costs a n + b n^2: twice the tokens in one sequence take more than twice the time. At 16k tokens the
quadratic part is 30 % of a 70B's forward, so that balancing by tokens leaves the rank with the long ones 15-20 % behind.

Ranks are balanced by cost and by whole groups where possible, because a group's tokens travel as one payload: a rank that trains
one sample of it fetches all. Micro-batches are balanced by tokens, because tokens are what memory holds.
"""

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """What cannot be divided: a sample, or a preference pair."""
    group: int
    tokens: int
    cost: float


def over_ranks(items: list[Item], ranks: int) -> list[list[int]]:
    """[rank] -> indices of its items. Groups go whole to the emptiest rank, most expensive first, until one would overfill it
    beyond the mean; that one's samples, and those of all later ones that do not fit, go singly.
    """
    groups: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(item.group, []).append(index)
    costs = {group: sum(items[index].cost for index in members) for group, members in groups.items()}
    share = sum(costs.values()) / ranks
    filled = [(0.0, rank) for rank in range(ranks)]
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for group in sorted(groups, key=lambda group: (-costs[group], group)):
        members = groups[group]
        whole = filled[0][0] + costs[group] <= share * (1 + 1e-9)
        parts = [members] if whole else [[index] for index in sorted(members, key=lambda index: (-items[index].cost, index))]
        for part in parts:
            cost, rank = heapq.heappop(filled)
            chosen[rank] += part
            heapq.heappush(filled, (cost + sum(items[index].cost for index in part), rank))
    return chosen


def into_bins(items: list[Item], chosen: list[int], count: int) -> list[list[int]]:
    """`chosen` in `count` micro-batches (some may be empty) of about equally many tokens: longest first, onto the emptiest."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for index in sorted(chosen, key=lambda index: (-items[index].tokens, index)):
        tokens, number = heapq.heappop(filled)
        bins[number].append(index)
        heapq.heappush(filled, (tokens + items[index].tokens, number))
    return [sorted(members) for members in bins]


def plan_micro_batches(items: list[Item], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices of items, ascending. Equal counts on all ranks, since every micro-batch is a collective.

    As few as keep each at `max_tokens` or below; an item that is longer by itself is alone.
    """
    shares = over_ranks(items, ranks)
    count = max(1, max(-(-sum(items[index].tokens for index in share) // max_tokens) for share in shares))
    while True:
        plan = [into_bins(items, share, count) for share in shares]
        batches = [members for batches in plan for members in batches]
        if all(len(members) < 2 or sum(items[index].tokens for index in members) <= max_tokens for members in batches):
            return plan
        count += max(1, count // 32)


def minibatches(groups: list[int], count: int) -> list[list[int]]:
    """`groups` in `count` runs whose lengths differ by one at most: what each optimizer update of an epoch sees."""
    size, more = divmod(len(groups), count)
    starts = [number * size + min(number, more) for number in range(count + 1)]
    return [groups[first:last] for first, last in zip(starts, starts[1:], strict=False)]

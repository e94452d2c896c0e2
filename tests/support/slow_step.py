"""One step of the simulator the slow way: no heap, no parts taken together, every rule looked up anew at every moment.

Written apart from the event loop, from its rules, so that it can judge it. Only for the backward schedule.
"""

from gradwire.sim.events import COMPUTE, INTER, INTRA, LATE, POOL


def slow_step(work, rules):
    """The step's length, in the units of the work."""
    now, part = 0, 0
    running = []  # (end, resource, row, or None for computation)
    at = [0] * len(work.rows)
    since = [0] * len(work.rows)  # when the row's next task became possible
    ready = set()
    while True:
        for entry in [entry for entry in running if entry[0] == now]:
            running.remove(entry)
            if (row := entry[2]) is None:
                opened = gated_by(work, at, set(work.releases[part]))
                ready |= set(work.releases[part])
                part += 1
            else:
                at[row] += 1
                opened = [row]
            for index in opened:
                since[index] = now
        for resource in (INTRA, INTER, POOL, COMPUTE):
            while start := begin(resource, now, work, rules, at, since, ready, running, part):
                running.append(start)
        if not running:
            return now
        now = min(end for end, _, _ in running)


def gated_by(work, at, fresh):
    """Rows whose next task waits for one of these gates."""
    return [index for index, tasks in enumerate(work.rows) if at[index] < len(tasks) and tasks[at[index]].gate in fresh]


def begin(resource, now, work, rules, at, since, ready, running, part):
    """Return the entry of `running` for the task that this resource begins now; None if it is busy or has no task."""
    busy = [entry for entry in running if entry[1] == resource]
    if len(busy) >= (rules.cpu_workers if resource == POOL else 1):
        return None
    at_work = {row for _, _, row in running}
    offers = []
    for row, tasks in enumerate(work.rows):
        if row in at_work or at[row] == len(tasks) or tasks[at[row]].resource != resource:
            continue
        task = tasks[at[row]]
        if task.gate < 0 or task.gate in ready:
            offers.append((row, task))
    if resource == COMPUTE:
        urgent = [offer for offer in offers if offer[1].urgency < LATE]
        if not urgent and part < len(work.lengths):
            return now + work.lengths[part], COMPUTE, None
        offers = urgent or offers
        key = lambda offer: (offer[1].urgency, offer[1].order)  # noqa: E731
    elif resource == POOL or rules.lanes:
        key = lambda offer: (since[offer[0]], offer[1].order)  # noqa: E731
    else:
        left = [t.order for row, tasks in enumerate(work.rows) for t in tasks[at[row] :] if t.resource == resource]
        left = [order for order in left if order not in {work.rows[r][at[r]].order for _, x, r in running if x == resource}]
        offers = [offer for offer in offers if offer[1].order == min(left)]
        key = lambda offer: offer[1].order  # noqa: E731
    if not offers:
        return None
    row, task = min(offers, key=key)
    return now + task.length, resource, row

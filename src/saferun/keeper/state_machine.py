"""An object whose life is a table of states, events and what follows from both.

Standard library only: the keeper uses it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

State = str
Event = str | type  # a message is an event of its type
# (state, event) -> (action, next state); an action is a method of the object, None is none.
Table = Mapping[tuple[State, Event], tuple[Callable[..., None] | None, State]]


def rows(
    states: Iterable[State],
    events: Iterable[Event],
    action: Callable[..., None] | None,
    following: State = "",
) -> Table:
    """Return the rows of a table in which the same follows from each event in each state.

    Args:
        states: where they may come.
        events: what may come.
        action: what is done then.
        following: the next state; "": it stays.
    """
    return {(state, event): (action, following or state) for state in states for event in events}


class StateMachine:
    """Follows a table.

    Args:
        table: every event that is allowed in a state, the action and the state that follows.
        state: the first state.
    """

    def __init__(self, table: Table, state: State) -> None:
        self._table = table
        self.state = state

    def step(self, event: Event, *details: object) -> None:
        """Go to the next state, then act; the action is called with `details`.

        Raises:
            RuntimeError: the table has no such event in this state, which is a fault of ours.
        """
        found = self._table.get((self.state, event))
        if found is None:
            name = event if isinstance(event, str) else event.__name__
            raise RuntimeError(f"{type(self).__name__}: no event `{name}` in state `{self.state}`")
        action, self.state = found
        if action:
            action(self, *details)

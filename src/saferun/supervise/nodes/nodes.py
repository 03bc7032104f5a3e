"""What a run needs of the other nodes that take part in it; where it has none, it is alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from saferun.diagnosis.attempt_outcome import AttemptOutcome, Decision
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.inject.node.node_agreement import AgreedStart
from saferun.model import LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.one_attempt import Attempt


class Agreed(NamedTuple):
    """What the nodes of a run have agreed on; nothing if they did not meet."""

    decision: Decision | None = None  # None: each decides, after an attempt with ranks
    last: AttemptOutcome | None = None  # the last attempt, as the node knows it where it failed
    mitigations: tuple[str, ...] | None = None  # those in force from now on


class Telling(NamedTuple):
    """What a node tells people of the end of an attempt."""

    host: str = ""  # where the failure began; "" for this one
    diagnosis: Diagnosis | None = None  # of the run, if not that of its last attempt
    is_silent: bool = False  # it tells the other nodes first


class Nodes:
    """The nodes of a run, as this one knows them: here it is alone (PeerNodes has others).

    Attributes:
        start: what the nodes have agreed on for the next attempt; None: nothing yet.
    """

    start: AgreedStart | None = None

    def begins(self, number: int, gathered: RunInputs) -> RunInputs:
        """Return the inputs of the next attempt: its number, and a profile that all nodes share.

        Args:
            number: the attempt's number on this node alone.
            gathered: the run's inputs.
        """
        return gathered._replace(identity=gathered.identity._replace(attempt=number))

    def environ(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Return the variables with which an attempt's agent meets the other nodes."""
        return {}

    def met(self, attempt: Attempt, ended: AttemptEnd, last: AttemptOutcome | None) -> Agreed:
        """Return the nodes' agreement before an attempt that has now ended.

        Args:
            attempt: the attempt.
            ended: how it ended.
            last: the last attempt with ranks before it.

        Returns:
            With a decision if no rank was started; without one if ranks ran, or may have run.
        """
        return Agreed()

    def lost(self) -> str:
        """Return a message on nodes that were lost in the last attempt; "" for none."""
        return ""

    def shared(self, ended: AttemptEnd, last: AttemptOutcome, decision: Decision) -> Agreed:
        """Return the nodes' decision after an attempt with ranks that has failed or succeeded.

        Args:
            ended: how the attempt ended.
            last: its record.
            decision: this node's own decision.
        """
        return Agreed(decision)

    def status(self, own: int) -> int:
        """Return the run's exit status: its own, or that of the nodes' decision."""
        return own

    def telling(self, decision: Decision) -> Telling:
        """Return what this node tells people of a decision."""
        return Telling()

    def close(self) -> None:
        """Remove what was made only for this run."""

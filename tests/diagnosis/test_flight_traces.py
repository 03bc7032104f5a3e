"""Of traces made as NVIDIA's four public ones are, exactly the ranks that were struck are named."""

import pytest
from flight_traces import TRACES, dumps

from saferun.diagnosis.flight_record import compare, read


@pytest.mark.parametrize("ahead", [0, 1, 6])
@pytest.mark.parametrize("name", TRACES)
def test_exactly_the_struck_ranks_are_named(name, ahead):
    """Others wait for them, some of those for each other, and a stage of the pipeline for these."""
    trace = TRACES[name]
    for has_config in (True, False):
        contents = dumps(trace, ahead=ahead, has_config=has_config)
        whole = {rank: dump for rank, content in contents.items() if (dump := read(content))}
        assert len(whole) == len(contents)
        found = compare(whole)
        assert (found.kind, found.ranks) == ("hang", trace.struck), found.line
        without = {rank: dump for rank, dump in whole.items() if not dump.is_empty}
        found = compare(without, asked=whole.keys())
        assert (found.kind, found.ranks) == ("hang", trace.struck), found.line

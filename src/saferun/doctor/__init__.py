"""Is this machine fit? `examination` collects the facts and judges them; `page` shows them.

The collectors (nvidia, torchfacts, host, network, kernellog; full with --full) fill the frozen
values of `vitals`, each within its time; the checks_* rooms and `xid` are pure and make findings.
peercheck.py and measure.py are programs of their own, run in child processes.
"""

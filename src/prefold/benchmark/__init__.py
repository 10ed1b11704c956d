"""Measurements for `prefold bench`: engines, a peer and the machine's matrix multiplication, side by side.

Whatever `latency` measures lives in a process of its own (`side`), loaded once and idle until asked, so that
layouts can be compared by turns in one run and none disturbs the threads or core binding of another.
`serve_*` put load on a server that is running, over HTTP.
"""

"""Who asks, and what it cost: decoder, engine, workloads, measurement, records, reports and the command line.

It does not know where a strategy keeps its rows; it only talks to the cache contract.
"""

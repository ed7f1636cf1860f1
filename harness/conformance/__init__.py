"""The conformance kit: is a KV cache right? Independent oracles, directed cases and random lives, for any cache of the contract.

It needs neither pytest nor a model. `python -m harness.conformance STRATEGY` prints a report card.
"""

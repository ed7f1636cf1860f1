"""The chapters of the kit: one file for each kind of fault, each a list of promises.

They know the contract and the world; they do not know any particular strategy.
"""

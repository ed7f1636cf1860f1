"""Where a token's K and V live: integers on the host, tensors on the device, one file for each storage.

Knows sequences, pages and row formats. It has never heard of a model, a prompt, a config file or a clock.
"""

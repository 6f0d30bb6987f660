"""The operations that strategies are made of, a file for each family.

An operation is one class: its few fields, and all that is known of it. What value it makes, and how that lies on the
ranks; what it takes of a device, of memory and of the network; how it runs. Strategies emit operations, cost models and
the runtime ask them; nobody else asks what kind an operation is.
"""

"""Communication libraries, one file each: how a collective is executed, how many run at once, what that costs.

The runtime and the cost models read the same one.
"""

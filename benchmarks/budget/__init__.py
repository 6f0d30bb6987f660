"""What lossy synchronization costs in quality, and whether a choice among its methods keeps a declared budget.

Updates of synchronous and local methods do not depend on the network, so how a method trains and how fast it steps are
measured apart. Here: how it trains. Real gloo ranks train small tasks to their end, each method paired with exact
training (same weights, same batches in the same order), over several seeds. Outcomes are lines of a journal that goes
on where it stopped.
"""

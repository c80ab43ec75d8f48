"""Bugs put in by hand, each with the test that has to find it: a measure of the suite.

`make bugs` takes the rules of the product out, one by one, each in a copy of the tree.
"""

"""The rules that arguments must keep, one family a file.

Every error says what was given, the rule, and the nearest setting that works.
"""

"""The exceptions and warnings that opintercept raises on its own account.

Invariant: misuse is a TypeError or ValueError; these are for what only shows at run time.
Imports nothing.
"""

from __future__ import annotations


class OpInterceptError(RuntimeError):
    """Interception cannot go on as asked: blocks left out of order, a torch without the API needed."""


class HookError(OpInterceptError):
    """A hook broke its contract: it returned inputs or an output that cannot take the place of the real ones."""


class NonFiniteError(OpInterceptError, ArithmeticError):
    """`hooks.NonFinite` has found where a value that is not finite was made."""


class OpInterceptWarning(UserWarning):
    """Something that the reader should know and the program survives: a hook was switched off, for one."""


for _public in (OpInterceptError, HookError, NonFiniteError, OpInterceptWarning):
    _public.__module__ = "opintercept"

"""The one class of errors that a person can act on; every room but kernels/ raises these, and no other room's."""


class UserError(ValueError):
    """What a person asked for, or what was found on disk, cannot be: one sentence naming it and the way out.

    The command prints the sentence and nothing else. Whatever is no UserError is a fault of ours or of a library's, and
    its traceback is kept.
    """

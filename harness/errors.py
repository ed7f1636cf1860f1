"""The one exception that means the user, and not the program, has to change something.

It does not know how it is shown: the command line prints the message without a traceback and exits with code 2.
"""


class UserError(Exception):
    """Bad input or environment. The message is one clear sentence: the value, what is allowed, what to do."""

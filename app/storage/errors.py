"""The error of this room: something on disk that cannot be read, written or trusted."""


class StorageError(Exception):
    """A file or directory cannot be used; the message says which one, why, and what to do."""

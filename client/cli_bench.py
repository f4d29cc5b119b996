"""`muxk bench`."""


def bench() -> None:
    pass

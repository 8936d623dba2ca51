"""Numbers of things in messages, as ``ngettext`` has them for the server."""


def counted(number: int, what: str, verb: tuple[str, str] | None = None) -> str:
    """Format ``1 change``, ``2 changes``; with ``("was", "were")`` the verb too.

    :param what: one of them.
    """
    text = f"{number} {what}{'' if number == 1 else 's'}"
    return text if verb is None else f"{text} {verb[number != 1]}"

"""Commands that define a subscription: ``create``, ``alter``, ``refresh``, ``drop``, ``enable``, ``disable``."""

"""Commands that serve and watch: ``run``, ``status``, ``wait``, ``demo``, ``version``, ``completion``."""

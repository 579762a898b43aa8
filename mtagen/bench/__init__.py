"""``mtagen bench``: every contender at the same sizes in the same run, on this machine.

:mod:`.cases` says what is measured, :mod:`.contenders` who competes, :mod:`.timing` and :mod:`.rates` how time and the
machine's limits are taken; :mod:`.run` does it and :mod:`.report` shows it.
"""

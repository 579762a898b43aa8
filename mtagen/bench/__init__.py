"""``mtagen bench``: every contender at the same sizes in the same run, on this machine.

:mod:`.suites` defines the cases, :mod:`.contenders` the contenders, and :mod:`.rates` measures the
machine; :mod:`.run` measures. :mod:`.runs` reads the results. :mod:`.report` shows them on a
console and :mod:`.summary` on pages (both with :mod:`.columns` and :mod:`.tables`); :mod:`.plots`
draws them; :mod:`.compare` compares two runs.
"""

"""``mtagen bench``: every contender at the same sizes in the same run, on this machine.

:mod:`.suites` says what is measured, :mod:`.contenders` who competes and :mod:`.rates` what the machine can do;
:mod:`.run` measures. What was measured is read by :mod:`.runs` and shown by :mod:`.report` on a console, by
:mod:`.summary` on pages (both of them by way of :mod:`.columns` and :mod:`.tables`) and by :mod:`.plots`;
:mod:`.compare` sets one run against another.
"""

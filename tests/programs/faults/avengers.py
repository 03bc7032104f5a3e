"""A hundred processes that would act, as "avenger", on the death of the one that started them."""

import os

from roster import join, stay

reading, writing = os.pipe()
for _ in range(100):
    if os.fork() == 0:
        os.close(writing)
        join("watcher")
        os.read(reading, 1)  # comes back when its parent has died
        join("avenger")
        os._exit(0)
join("agent")
stay()

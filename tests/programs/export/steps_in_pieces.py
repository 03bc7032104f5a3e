"""Two thousand steps, each written in two pieces, some milliseconds apart."""

import os
import random
import time

for i in range(2000):
    text = f"attempt {i} 5.000 .\n".encode()
    cut = random.choice([random.randrange(1, len(text)), len(text) - 1, len(text) - 2])
    os.write(1, text[:cut])
    time.sleep(random.choice([0.0028, 0.003, 0.004]))
    os.write(1, text[cut:])

"""Imported last by the fork server: ranks neither search what it imported for garbage nor finalize it at their end.

Each of the two touches the memory of all modules, which the system then copies: most of the time of a short rank.
"""

import gc
import weakref

from patrickstar._hardware.cpu_allocator import native_library

native_library()  # ranks with a home of their own would compile it anew
gc.collect()
gc.freeze()
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False

"""Typed seam of the C++ extension. Sections follow csrc/bindings/register_*.cpp."""

import numpy as np
from numpy.typing import NDArray

# --- register_storage.cpp -----------------------------------------------------------------------

# --- register_packing.cpp -----------------------------------------------------------------------

# --- register_data.cpp --------------------------------------------------------------------------

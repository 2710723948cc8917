"""Every test runs with this package's hypothesis settings."""

from ckpttools.testing.profile import use_profile

use_profile()

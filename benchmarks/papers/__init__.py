"""Methods of the papers that gradwire is compared with, and the exact answers that its searches are tested against."""

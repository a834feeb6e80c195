"""`keel migrate`: configurations and scripts of other trainers, translated."""

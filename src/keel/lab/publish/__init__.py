"""A checkpoint's model to a hub or a folder, and back."""

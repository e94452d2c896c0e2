"""gradwire inside other frameworks, one file each. A framework's file is imported only by scripts that use it."""

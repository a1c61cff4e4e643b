"""Real coding agents from npm: install.sh installs them, drive.py puts them to work."""

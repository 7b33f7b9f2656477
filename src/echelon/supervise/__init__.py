"""Starting, watching and restarting the processes of a machine, and agreeing on it with other machines."""

"""The protocol between launchers of several hosts: rendezvous, membership, admission."""

"""`afd serve FILE --ray`: attention and FFN instances as actors of a Ray cluster.

plan      what each instance needs and runs; pure
keeper    the actor beside an instance's processes, on their node
placed    one instance as the driver sees it: which call of its actor comes next
serve     the driver: control plane, gateway, restarts, shutdown
"""

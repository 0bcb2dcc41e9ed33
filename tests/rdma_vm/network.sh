# Sourced in the guest. Two veth pairs, a0-f0 and a1-f1, give each side (a: attention, f: FFN) two
# RoCE ports. Real packets cross them, so `tc qdisc add dev a0 root netem loss 1%` works.
for i in 0 1; do
  ip link add a$i type veth peer name f$i
  ip link set a$i mtu 4200 up
  ip link set f$i mtu 4200 up
  ip addr add 10.9.$i.1/24 dev a$i
  ip addr add 10.9.$i.2/24 dev f$i
done
for i in a0 a1 f0 f1 all; do
  echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local
  echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter
done
for i in a0 a1 f0 f1; do rdma link add rx$i type rxe netdev $i; done

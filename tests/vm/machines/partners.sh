#!/bin/sh
# Pid 1 of a guest that has the kernel's rxe on its network, and runs the check program there. The kernel gives `guest`, an address with its
# prefix length, from its command line.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
    insmod "$module" || echo "cannot load $module"
done
ip link set lo up
ip address add "$guest" dev eth0
ip link set eth0 up
rdma link add rxe0 type rxe netdev eth0
# An acknowledge timeout of 2 s: a guest without KVM is slow.
vcheck -d rxe0 -x 1 --stall-timeout 120 --ack-timeout 19 &
# Until it listens at its port, 18516. A look by a connection would be taken for its client.
until grep -q ':4854 ' /proc/net/tcp /proc/net/tcp6; do
    sleep 0.1
done
echo "the guest is ready"
wait $!
echo "the check has ended with $?"
while :; do
    sleep 1000
done

#!/bin/sh
# Pid 1 of a guest that works on its memory and on the file system of its disk, and compares all that it reads. The kernel gives `seconds`, how
# long, from its command line.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
    insmod "$module" || echo "cannot load $module"
done
mkdir /disk
mount -t ext4 /dev/vda /disk || echo "there is no file system"
# What the kernel knows of the disk's size.
(
    read -r known </sys/class/block/vda/size
    while :; do
        read -r sectors </sys/class/block/vda/size
        if [ "$sectors" != "$known" ]; then
            echo "the disk has $sectors sectors"
            known=$sectors
        fi
        sleep 1
    done
) &
echo "the guest is ready"
stress-ng --timeout "$seconds" --verify --vm 1 --vm-bytes 64M --vm-method all --hdd 1 --hdd-bytes 16M \
    --hdd-opts direct,wr-rnd,rd-rnd --temp-path /disk --metrics-brief
echo "the load has ended with $?"
cd /
umount /disk
e2fsck -f -n /dev/vda
echo "the file system is checked with $?"
while :; do
    sleep 1000
done

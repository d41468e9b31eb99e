/* The first instructions of the guest: QEMU's -kernel loads a multiboot program and starts it in 32-bit protected mode
 * (Multiboot Specification 0.6.96, §3). */
.set MAGIC, 0x1badb002
.section .multiboot, "a"
.align 4
.long MAGIC
.long 0
.long -MAGIC

.section .bss
.align 16
stack:
.skip 16384
stack_top:

.section .text
.global start
start:
    mov $stack_top, %esp
    push %ebx /* what Multiboot hands over */
    call check
1:  hlt
    jmp 1b

.section .note.GNU-stack, "", @progbits

# A boot sector that does, once, what every 64-bit kernel does in its first moments, and then tells QEMU so.
#
# It is written for one question: does this accelerator run guests? A /dev/kvm can be there and run firmware, and hang
# as soon as a kernel brings its own page tables, interrupts or user mode. So the probe enters long mode on page tables
# of its own, replaces them while they are in use, takes an exception, takes timer interrupts out of a halt, and goes
# to ring 3 and back. Only then does it write to the port of isa-debug-exit.
#
# Memory: 0x7c00 this sector and below it the stack; 0x10000 page tables; 0x20000 the interrupt table;
# 0x30000 the task segment.

        .set EXIT_PORT, 0xf4
        .set EXIT_VALUE, 0x2a
        .set TICKS, 3

        .code16
        .globl _start
_start: cli
        xorw    %ax, %ax
        movw    %ax, %ss
        movw    $0x7c00, %sp
        movw    %ax, %ds
        cld

        # Two sets of page tables, each with one entry a level: 1 GiB, of which 2 MiB are mapped.
        movw    $0x1000, %ax
        movw    %ax, %es
        xorw    %di, %di
        xorl    %eax, %eax
        movw    $0x1800, %cx
        rep stosl
        movw    $0x1007, %es:0x0000
        movw    $0x0001, %es:0x0002
        movw    $0x2007, %es:0x1000
        movw    $0x0001, %es:0x1002
        movw    $0x0087, %es:0x2000
        movw    $0x4007, %es:0x3000
        movw    $0x0001, %es:0x3002
        movw    $0x5007, %es:0x4000
        movw    $0x0001, %es:0x4002
        movw    $0x0087, %es:0x5000

        lgdtl   gdt_at
        movl    $0xa0, %eax             # PAE, PGE
        movl    %eax, %cr4
        movl    $0x10000, %eax
        movl    %eax, %cr3
        movl    $0xc0000080, %ecx       # EFER: long mode, system calls
        rdmsr
        orw     $0x101, %ax
        wrmsr
        movl    %cr0, %eax
        orl     $0x80000001, %eax
        movl    %eax, %cr0
        ljmpl   $0x08, $long

        .code64
long:   movl    $0x10, %eax
        movl    %eax, %ds
        movl    %eax, %es
        movl    %eax, %ss

        # The interrupt table: every vector leads to `back`, vector 6 to `undefined`, 0x20 to `tick`.
        movl    $0x20000, %edi
        movl    $0x100, %ecx
1:      movl    $back, %edx
        cmpb    $0xfa, %cl              # 0x100 - 6
        jne     2f
        movl    $undefined, %edx
2:      cmpb    $0xe0, %cl              # 0x100 - 0x20
        jne     3f
        movl    $tick, %edx
3:      movl    %edx, %eax
        orl     $0x00080000, %eax
        stosl
        movl    $0xee00, %eax
        stosl
        xorl    %eax, %eax
        stosl
        stosl
        loop    1b
        lidt    idt_at

        # The task segment has nothing but the stack for the way back from ring 3. The memory is not known to be zero.
        movl    $0x7000, 0x30004
        movl    $0, 0x30008
        movl    $0x28, %eax
        ltr     %ax

        # An exception, and its return.
        xorl    %ebx, %ebx
        ud2
        cmpl    $6, %ebx
        jne     stop

        # Other page tables, while the old ones are in use.
        movl    $0x13000, %eax
        movq    %rax, %cr3
        invlpg  0x7c00

        # Timer interrupts out of a halt.
        movl    $pic, %esi
        movl    $12, %ecx
4:      movzbl  (%rsi), %edx
        movb    1(%rsi), %al
        outb    %al, %dx
        addl    $2, %esi
        loop    4b
        xorl    %ebx, %ebx
5:      sti
        hlt
        cli
        cmpl    $TICKS, %ebx
        jb      5b

        # To ring 3, and back by an interrupt.
        pushq   $0x23
        pushq   $0x6000
        pushq   $0x02
        pushq   $0x1b
        pushq   $user
        iretq
user:   movl    $0x33, %ebx
        int     $0x80
stop:   hlt
        jmp     stop

undefined:
        movl    $6, %ebx
        addq    $2, (%rsp)
        iretq
tick:   incl    %ebx
        movb    $0x20, %al
        outb    %al, $0x20
        iretq
        # Vector 0x80 out of ring 3 is the end of the way; anything else is not.
back:   cmpl    $0x33, %ebx
        jne     stop
        testb   $3, 8(%rsp)
        jz      stop
        movb    $EXIT_VALUE, %al
        outb    %al, $EXIT_PORT
        jmp     stop

        # The interrupt controllers begin at 0x20 and let only the timer through; the timer runs at about 1 kHz.
pic:    .byte   0x20,0x11, 0xa0,0x11, 0x21,0x20, 0xa1,0x28, 0x21,0x04, 0xa1,0x02, 0x21,0x01, 0xa1,0x01
        .byte   0x21,0xfe, 0x43,0x34, 0x40,0xa9, 0x40,0x04
        .balign 8
gdt:    .quad   0
        .quad   0x00209a0000000000      # 0x08 code, ring 0
        .quad   0x0000920000000000      # 0x10 data, ring 0
        .quad   0x0020fa0000000000      # 0x18 code, ring 3
        .quad   0x0000f20000000000      # 0x20 data, ring 3
        .quad   0x0000890300000067      # 0x28 the task segment at 0x30000
        .quad   0
gdt_at: .word   55
        .long   gdt
idt_at: .word   0xfff
        .quad   0x20000
        .org    510
        .word   0xaa55

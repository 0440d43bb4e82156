/* A driver library of a simulated host: it loads, has the right SONAME, and does nothing. */

__attribute__((visibility("default")))
const char ocigpu_simulated[] = "This is a library of a simulated GPU host: there is no GPU behind it.";

#ifdef WITH_ABI_NOTE
/* The driver's libnvidia-tls.so says GNU/Linux ABI 2.3.99, and tools recognise it by that (ELF note NT_GNU_ABI_TAG). */
__attribute__((section(".note.ABI-tag"), aligned(4), used))
static const struct {
    unsigned int name_size, description_size, type;
    char name[4];
    unsigned int description[4];
} abi_note = {4, 16, 1, "GNU", {0, 2, 3, 99}};
#endif

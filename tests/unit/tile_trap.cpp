// Runs AMX's instructions on processors without them: each is illegal there, and this handler does its work.
// Written after their published definition, one element after the other, as a second opinion on tiles.h.

#include <signal.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "amx.h"

namespace {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

struct {
    bool is_configured;
    Config config;
    uint8_t tiles[8][16][64];
    int64_t products, others, mistakes;
    struct sigaction before;
} state;

greg_t& general_register(ucontext_t* context, int number) {
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[places[number]];
}

// Of an instruction with a VEX prefix of three bytes.
struct Instruction {
    uint8_t r, x, b, map, w, third, length_bit, prefix, opcode, mode, reg, rm;
    int64_t base, index;  // of an operand in memory
    int size;
};

Instruction decode(const uint8_t* code, ucontext_t* context) {
    Instruction i = {};
    i.r = !(code[1] >> 7 & 1), i.x = !(code[1] >> 6 & 1), i.b = !(code[1] >> 5 & 1), i.map = code[1] & 31;
    i.w = code[2] >> 7, i.third = ~(code[2] >> 3) & 15, i.length_bit = code[2] >> 2 & 1, i.prefix = code[2] & 3;
    i.opcode = code[3], i.mode = code[4] >> 6, i.reg = (code[4] >> 3 & 7) | i.r << 3, i.rm = code[4] & 7;
    i.size = 5;
    if (i.mode == 3) return i.rm |= i.b << 3, i;
    bool has_base = true;
    int base = i.rm;
    if (i.rm == 4) {
        const uint8_t sib = code[i.size++];
        const int index = (sib >> 3 & 7) | i.x << 3;
        if (index != 4) i.index = general_register(context, index) << (sib >> 6);
        base = sib & 7;
        has_base = base != 5 || i.mode != 0;
    }
    int32_t displacement = 0;
    if (i.mode == 1) displacement = int8_t(code[i.size++]);
    if (i.mode == 2 || !has_base) std::memcpy(&displacement, code + i.size, 4), i.size += 4;
    if (i.mode == 0 && i.rm == 5) state.mistakes++;  // relative to the instruction: not expected
    i.base = (has_base ? general_register(context, base | i.b << 3) : 0) + displacement;
    return i;
}

float widened(const uint8_t* bfloat16) {
    uint32_t bits = uint32_t(bfloat16[1]) << 24 | uint32_t(bfloat16[0]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void multiply(int sums, int a, int b) {
    const Config& c = state.config;
    const int rows = c.rows[sums], columns = c.bytes[sums] / 4, depth = c.bytes[a] / 4;
    if (sums == a || sums == b || a == b || c.rows[a] != rows || c.bytes[b] != c.bytes[sums] || c.rows[b] != depth)
        state.mistakes++;
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < columns; n++) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < depth; k++) {
                const uint8_t *x = &state.tiles[a][m][4 * k], *y = &state.tiles[b][k][4 * n];
                even = std::fma(widened(x), widened(y), even);
                odd = std::fma(widened(x + 2), widened(y + 2), odd);
            }
            std::memcpy(&sum, &state.tiles[sums][m][4 * n], 4);
            sum += even + odd;
            std::memcpy(&state.tiles[sums][m][4 * n], &sum, 4);
        }
    state.products++;
}

void configure(const Config* config) {
    state.config = *config;
    state.is_configured = true;
    std::memset(state.tiles, 0, sizeof state.tiles);
    if (config->palette != 1 || config->start_row != 0) state.mistakes++;
    for (int t = 0; t < 16; t++)
        if (config->rows[t] > (t < 8 ? 16 : 0) || config->bytes[t] > (t < 8 ? 64 : 0)) state.mistakes++;
    for (uint8_t byte : config->reserved) state.mistakes += byte != 0;
}

// Whether it is one of AMX's.
bool execute(const Instruction& i) {
    if (i.map != 2 || i.w || i.length_bit) return false;
    if (i.opcode == 0x49 && i.prefix == 0) {
        if (i.mode == 3) state.is_configured = false;
        else configure(reinterpret_cast<const Config*>(i.base + i.index));
        return true;
    }
    if (i.opcode != 0x49 && i.opcode != 0x4b && i.opcode != 0x5c) return false;
    if (!state.is_configured) state.mistakes++;
    if (i.opcode == 0x49 && i.prefix == 3 && i.mode == 3) {
        std::memset(state.tiles[i.reg], 0, sizeof state.tiles[0]);
    } else if (i.opcode == 0x4b && i.mode != 3 && (i.prefix == 2 || i.prefix == 3)) {
        for (int row = 0; row < state.config.rows[i.reg]; row++) {
            uint8_t *tile = state.tiles[i.reg][row], *memory = reinterpret_cast<uint8_t*>(i.base + row * i.index);
            if (i.prefix == 3) std::memcpy(tile, memory, state.config.bytes[i.reg]);
            else std::memcpy(memory, tile, state.config.bytes[i.reg]);
        }
    } else if (i.opcode == 0x5c && i.prefix == 2 && i.mode == 3) {
        multiply(i.reg, i.rm, i.third);
        return true;
    } else {
        return false;
    }
    state.others++;
    return true;
}

void handle(int, siginfo_t*, void* pointer) {
    auto* context = static_cast<ucontext_t*>(pointer);
    const auto* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
    _mm_setcsr(0x9fc0);  // denormal numbers are 0, exceptions are masked
    if (code[0] == 0xc4) {
        const Instruction instruction = decode(code, context);
        if (execute(instruction)) {
            context->uc_mcontext.gregs[REG_RIP] += instruction.size;
            return;
        }
    }
    sigaction(SIGILL, &state.before, nullptr);  // and again, as if this had not been here
}

}  // namespace

extern "C" void trap_begin() {
    const struct sigaction before = state.before;
    state = {};
    state.before = before;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, &state.before);
}

// How many products were computed here, how many other instructions executed, what was wrong, and whether the
// tiles were left configured.
extern "C" void trap_end(int64_t* found) {
    sigaction(SIGILL, &state.before, nullptr);
    found[0] = state.products;
    found[1] = state.others;
    found[2] = state.mistakes;
    found[3] = state.is_configured;
}

// Whether this compiler makes code for AMX.
extern "C" int trap_has_use() {
#if defined(PREFOLD_HAS_AMX)
    return 1;
#else
    return 0;
#endif
}

// A client of `jetdraft serve` with libcurl: the whole text, or its pieces as they come.
//
//     c++ -std=c++17 -O2 client.cpp -lcurl -o client
//     ./client http://127.0.0.1:8080 "The robot sees"                  the whole answer
//     ./client http://127.0.0.1:8080 "The robot sees" --stream         each event
//     ./client http://127.0.0.1:8080 "The robot sees" --cancel 3       three, then away
//     ./client http://localhost "The robot sees" --uds /run/jetdraft/socket
//
// The key of a server that wants one comes from JETDRAFT_API_KEY. It prints JSON, one
// object a line; a program of your own reads it with the JSON library that it has.
#include <curl/curl.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>

namespace {

struct Options {
    std::string address, prompt, socket;
    bool stream = false;
    long cancel_after = 0;  // events; 0 reads to the end
};

// What arrives: whole, or cut into server-sent events.
struct Answer {
    const Options& options;
    std::string rest;
    long events = 0;
    bool cancelled = false;

    void line(const std::string& text) {
        if (text.rfind("data: ", 0) != 0 || text == "data: [DONE]") return;
        std::cout << text.substr(6) << std::endl;
        cancelled = ++events == options.cancel_after;
    }

    // Returns false to close the connection, which ends the text at its next round.
    bool take(const char* data, size_t size) {
        rest.append(data, size);
        if (!options.stream) return true;
        for (size_t end; !cancelled && (end = rest.find('\n')) != std::string::npos;) {
            line(rest.substr(0, end));
            rest.erase(0, end + 1);
        }
        return !cancelled;
    }
};

size_t receive(char* data, size_t size, size_t count, void* answer) {
    return static_cast<Answer*>(answer)->take(data, size * count) ? size * count : 0;
}

std::string quoted(const std::string& text) {
    std::string json = "\"";
    for (unsigned char c : text) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\u%04x", c);
        json += c < 0x20 || c == '"' || c == '\\' ? escape : std::string(1, c);
    }
    return json + '"';
}

Options options_of(int count, char** words) {
    Options options{words[1], words[2], ""};
    for (int i = 3; i < count; ++i) {
        const std::string word = words[i];
        if (word == "--uds" && i + 1 < count) options.socket = words[++i];
        if (word == "--cancel" && i + 1 < count) options.cancel_after = atol(words[++i]);
        options.stream |= word == "--stream" || word == "--cancel";
    }
    return options;
}

int ask(CURL* curl, const Options& options) {
    const std::string body = "{\"prompt\": " + quoted(options.prompt) +
                             ", \"max_tokens\": 64, \"temperature\": 0, \"stream\": " +
                             (options.stream ? "true}" : "false}");
    curl_slist* headers = curl_slist_append(nullptr, "Content-Type: application/json");
    if (const char* key = std::getenv("JETDRAFT_API_KEY"))
        headers = curl_slist_append(
            headers, ("Authorization: Bearer " + std::string(key)).c_str());
    Answer answer{options, ""};
    curl_easy_setopt(curl, CURLOPT_URL, (options.address + "/v1/completions").c_str());
    if (!options.socket.empty())
        curl_easy_setopt(curl, CURLOPT_UNIX_SOCKET_PATH, options.socket.c_str());
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE, static_cast<long>(body.size()));
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body.c_str());
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, receive);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, 5L);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT, 60L);  // a robot does not wait for ever
    const CURLcode code = curl_easy_perform(curl);
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    curl_slist_free_all(headers);
    if (!answer.rest.empty() && !answer.cancelled) std::cout << answer.rest << std::endl;
    if (code == CURLE_OK || answer.cancelled) return status == 200 ? 0 : 1;
    std::cerr << curl_easy_strerror(code) << std::endl;
    return 1;
}

}  // namespace

int main(int count, char** words) {
    if (count < 3) {
        std::cerr << "usage: client URL PROMPT [--stream] [--cancel EVENTS] [--uds PATH]\n";
        return 2;
    }
    const Options options = options_of(count, words);
    const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> curl(
        curl_easy_init(), curl_easy_cleanup);
    return curl ? ask(curl.get(), options) : 1;
}
